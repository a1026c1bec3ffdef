"""Plug-ins through which inference engines use the store: one sub-package per engine, on top of the client and the
hand-over.

Only the modules that an engine loads itself, such as a connector's base class, import the engine's package. Logic that
does not need the engine (keys, plans, loads and saves of a step) is in modules without that import, with their own
tests.
"""
