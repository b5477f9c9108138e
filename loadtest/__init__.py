"""Load tests of our and other serving containers over HTTP. They import no server code."""
