"""`baton top`: the router's console in a terminal. Imports neither the router nor torch."""
