"""Serves several models on one port: SageMaker's multi-model API and DJL's model store."""
