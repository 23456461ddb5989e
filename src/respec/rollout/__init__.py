"""Rollouts: requests in, completions out, exactly as plain decoding would have drawn them."""
