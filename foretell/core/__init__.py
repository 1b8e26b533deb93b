"""The heart: forest steps, trees, verification, caches, and the engine that answers what strategies
ask.
"""
