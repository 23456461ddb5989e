"""respec inside other people's programs."""
