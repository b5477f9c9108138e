"""Several models behind one door: SageMaker's multi-model API and DJL's model store."""
