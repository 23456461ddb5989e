"""How weights travel: from the learner to the engine by one door, and to disk."""
