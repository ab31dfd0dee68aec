"""How far two ways to compute a model differ, at six levels, and whether a policy allows it."""
