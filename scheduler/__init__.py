"""The scheduler: which rows of which sequences run next, and the engine that runs them.

`messages` and `client` are what the API process sees; importing them imports neither torch nor the model.
"""
