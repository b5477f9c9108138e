"""Load tests of serving containers over HTTP, ours and others; imports no server code."""
