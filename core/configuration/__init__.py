"""Options, limits, and the decisions that follow from them without a model."""
