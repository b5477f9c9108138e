"""What the APIs give: one stream of tokens, written in the shape of each."""
