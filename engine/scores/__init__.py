"""Scores of prompts (`prompt_logprobs`): the logprob of each token, given those before it."""
