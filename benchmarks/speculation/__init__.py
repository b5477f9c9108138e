"""What several tokens a step gain, beside other systems."""
