"""The grammars that answers must match. They are compiled on threads beside the engine's, and each sequence has a
matcher of its own."""
