"""`harm` and `soak`: what a hostile client costs other clients, and what many leave behind.

`rows` has the hostile requests, `neighbours` the ordinary clients beside them. `harm` sends one row
after another. `soak` mixes all clients at random and kills processes, and `findings` judges the
server's state afterwards.
"""
