"""The page of a recording (`longshore replay DIR --page`): any moment, and why requests waited."""
