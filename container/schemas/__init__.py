"""What the APIs take: bodies checked strictly, every mistake named as the client spelt it."""
