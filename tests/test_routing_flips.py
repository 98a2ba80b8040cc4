"""benchmarks/routing_flips.py: it finds the tokens with other experts, and the loss with another model's choices."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from routing_flips import Trained, batches, compare, flips  # noqa: E402


def test_a_flip_is_a_token_with_other_experts():
    ours = torch.tensor([[3.0, 2.0, 1.0, 0.0], [3.0, 2.0, 1.5, 0.0], [3.0, 2.0, 1.0, 0.0]])
    # Token 0 has the same two experts in another order, token 1 has another second expert, token 2 the same experts.
    theirs = torch.tensor([[2.0, 3.0, 1.0, 0.0], [3.0, 1.5, 1.75, 0.0], [3.0, 2.0, 1.0, 0.5]])
    assert flips(ours, theirs, 2) == [{"token": 1, "experts": [[1], [2]], "gaps": [0.5, 0.25]}]


@pytest.mark.usefixtures("one_thread")
def test_models_that_are_alike_do_not_part_and_other_choices_are_another_loss():
    one, other = Trained("eager"), Trained("eager")
    (windows,) = batches(1)
    row = compare(one, other, windows)
    assert row["flips"] == [] and row["apart"] == row["logits_apart"] == row["weights_apart"] == 0.0
    loss = one.loss(windows).item()
    routed = list(one.routed)
    assert one.loss_with(windows, routed) == loss
    logits, weights, ids = routed[1]
    ids = ids.clone()
    ids[2, -1] = min(set(range(logits.shape[1])) - {*ids[2].tolist()})
    assert one.loss_with(windows, [routed[0], (logits, weights, ids)]) != loss
    assert one.loss(windows).item() == loss  # the model's own routers choose again
