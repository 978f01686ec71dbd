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
