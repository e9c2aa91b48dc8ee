"""What the tests of conversions share: small models whose every weight matters."""

import torch
from transformers import PreTrainedModel

VOCAB = 97
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def make_peer(model_class: type[PreTrainedModel], config) -> PreTrainedModel:
    """A model with weights that no initialisation makes: norms off 1, biases off 0, decays of every head different."""
    torch.manual_seed(0)
    model = model_class(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def random_ids(*shape: int) -> torch.Tensor:
    """Token ids without the special ones."""
    return torch.randint(3, VOCAB, shape)
