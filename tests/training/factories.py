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


def broken_llama(vocab_size: int, forward: int):
    """The same model, whose second layer's MLP gives NaN from one forward pass of the process on (counted from 1)."""
    model = tiny_llama(vocab_size)
    passes = []

    def break_it(module, inputs, output):
        passes.append(None)
        return output * float("nan") if len(passes) >= forward else output

    model.model.layers[1].mlp.register_forward_hook(break_it)
    return model


def spiky_llama(vocab_size: int, forward: int):
    """The same model, whose loss is thirty times what it should be in one forward pass of training (counted from 1)."""
    model = tiny_llama(vocab_size)
    passes = []

    def spike(module, inputs, output):
        if module.training:
            passes.append(None)
            if len(passes) == forward:
                output.loss = output.loss * 30
        return output

    model.register_forward_hook(spike)
    return model


def lying_llama(vocab_size: int, forward: int):
    """The same model, whose loss is infinite in one forward pass though its gradient is finite."""
    model = tiny_llama(vocab_size)
    passes = []

    def lie(module, inputs, output):
        if module.training:
            passes.append(None)
            if len(passes) == forward:
                output.loss = output.loss + float("inf")
        return output

    model.register_forward_hook(lie)
    return model
