"""What answers must match: grammars are compiled beside the engine, and each sequence has a matcher of its own."""
