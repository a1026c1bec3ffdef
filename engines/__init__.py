"""Plug-ins through which inference engines use the store: a room an engine, over the client and the hand-over.

An engine's own package is imported only by the modules of its room that the engine itself asks for (a connector's base class, say). All
that can be decided without it (keys, plans, what a step loads and saves) stands in modules that import no engine, with tests of their own.
"""
