"""Servers under test: started, found or named, and watched while they answer."""
