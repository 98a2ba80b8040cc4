"""What a call goes through on its way from the user's tensors to an engine, and how it is refused or ended.

* `moe`: `flashmoe.moe`, the operator as a function
* `optional_context`: functions whose argument `ctx` may be left out
* `alone`: calls without a context: the shapes of their tensors decide which kept context they use
* `tokens`: tokens whose rows have several leading dimensions
* `profiled`: the names by which PyTorch's profilers show calls
* `keywords`: refuses unknown keyword arguments, and suggests the most similar known one; shows options in help
* `arguments`: the checks that both engines share, and the layer that the arguments describe
* `through_torch`: whether a call goes through PyTorch's operator (`flashmoe.pytorch.operator`)
* `tensors`: tensors as the engines take them, from any library that exports them by DLPack
* `capsule`: checks what a DLPack capsule says, before any code follows its pointers
* `refusals`: tells the group of calls that one rank cannot begin
* `ending`: stops the calls of daemon threads when Python ends
"""
