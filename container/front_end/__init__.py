"""The front end's process: gunicorn, its worker, and the Flask app with all routes."""
