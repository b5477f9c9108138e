"""The front-end process: gunicorn, its worker class, and the Flask app with all routes."""
