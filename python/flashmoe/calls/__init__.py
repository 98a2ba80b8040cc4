"""What a call goes through on its way from the user's tensors to an engine, and how it is refused or ended.

* `moe`: `flashmoe.moe`, the operator as a function
* `optional_context`: functions whose context may be left out
* `alone`: calls that are given no context: the shapes of the tensors say which one they take
* `tokens`: tokens whose rows have several leading dimensions
* `profiled`: names calls in what profilers show
* `keywords`: refuses unknown keyword arguments, and names the known one that is most alike; shows options in help
* `arguments`: the checks that both engines share, and the layer that the arguments describe
* `through_torch`: whether a call goes through PyTorch's operator (`flashmoe.pytorch.operator`)
* `tensors`: tensors as the engines take them, from any library that speaks DLPack
* `capsule`: checks what a DLPack capsule says, before anything follows its pointers
* `refusals`: tells the group of calls that one rank cannot begin
* `ending`: stops the calls of daemon threads when Python ends
"""
