"""Contexts: a process's membership in a group of ranks, with the memory that calls share.

* `context`: `flashmoe.Context`, and the calls that it makes
* `growing`: a context whose largest number of tokens grows with its calls
* `kept`: the contexts for calls that are given no context
* `limits`: what a context is made for, and the limits from which its engine allocates memory
* `memory`: how much memory a context takes, before it is made
"""
