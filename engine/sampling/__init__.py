"""The parts of sampling, in the order in which the sampler applies them.

```
allowed    allowed_token_ids                      all other logits
edits      bad_words, no_repeat_ngram_size (ngrams), min_tokens, logit_bias
                                                  numbers added to single logits
penalties  repetition, frequency, presence        of tokens that a sequence has
grammar    structured_outputs                     all that the grammar does not go on with
filters    temperature; min_p, top_k, top_p, typical_p
draw       one number decides
ranking    logprobs and prompt_logprobs           of the logits as the model gave them
```

It is vLLM's order, but for grammars, which have the last word here and the first there;
`typical_p`, which vLLM has not, comes last as in transformers. Each part plans a step on the host:
it puts what it needs on the device into one parcel, and returns what is to be done there once that
is sent, or None where no row asks for it. None of it waits.
"""
