"""Builders of engines: for the packed executor, for the library, and for several ranks.

Imports `engine.engine`, `engine.resolve`, `engine.memory` and the layers below them.
"""
