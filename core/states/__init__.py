"""What the layers of some models keep of a sequence, in place of K and V of every token."""
