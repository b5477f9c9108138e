"""Replicas of the container on many machines, behind one port (docs/scaling.md)."""
