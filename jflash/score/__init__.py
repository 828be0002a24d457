"""What the score of one (query, key) pair is, what options say of it, and which tiles are visited."""
