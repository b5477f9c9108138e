"""AWS's hooks: the user's functions around every request, as in AWS's model hosting standards."""
