"""The method of M-GRPO (arXiv 2511.13288) as pure functions of arrays.

Rewards, group-relative advantages, alignment and the clipped-ratio loss. Nothing here knows of models,
files or time, and nothing here imports another room.
"""
