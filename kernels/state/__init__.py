"""Operations of layers with state: short convolutions and recurrences."""
