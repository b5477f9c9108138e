"""`harm` and `soak`: what one hostile client costs all others, and what stays after hours of them.

`rows` has the hostile requests, `neighbours` the ordinary clients beside them. `harm` sends one row
after another; `soak` mixes everything at random, and kills processes; `findings` judges what stays.
"""
