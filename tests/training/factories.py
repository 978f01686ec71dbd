"""A model that is not ours, for `model.factory`."""


def tiny_llama(vocab_size: int, layers: int = 2):
    """A Llama-style model of Hugging Face, random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
        )
    )


def poisoned_llama(vocab_size: int, backward: int):
    """The same model, whose gradient is infinite in one backward pass of the process (counted from 1)."""
    model = tiny_llama(vocab_size)
    passes = []

    def poison(gradient):
        passes.append(None)
        return gradient * float("inf") if len(passes) == backward else gradient

    model.lm_head.weight.register_hook(poison)
    return model
