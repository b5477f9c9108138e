"""`harm` measures what one hostile client costs others; `soak`, what many clients leave behind.

`rows` has the hostile requests, `neighbours` the ordinary clients beside them. `harm` sends one row
after another. `soak` mixes all clients at random and kills processes, and `findings` judges the
server's state afterwards.
"""
