"""The steps of sampling, in the order in which the sampler applies them.

```
allowed    allowed_token_ids                      masks all other tokens
edits      bad_words, no_repeat_ngram_size (ngrams), min_tokens, logit_bias
                                                  add to single logits
penalties  repetition, frequency, presence        change logits of tokens in the sequence
grammar    structured_outputs                     masks tokens that the grammar does not allow
filters    temperature; min_p, top_k, top_p, typical_p
draw       draws a token with one uniform number; triton_draw does this and the filters on CUDA
ranking    logprobs and prompt_logprobs           from the model's unmodified logits
```

This is vLLM's order with two differences: vLLM applies grammars first, and it has no `typical_p`,
which comes last as in transformers. A sequence's first step decides which parts it uses; for a
plain greedy one these are none. Each part plans its work on the host: it puts the arrays that it
needs into the step's upload and returns a function to call once the upload is sent. Nothing waits
for the device.
"""
