"""The one base class of every error that dobnb raises on purpose, and the family that :mod:`dobnb.capture` raises."""


class DobnbError(Exception):
    """A problem that a user can mend. The message is one line: what happened, why, and what to do."""


def one_line(text: str) -> str:
    r"""`text` as it may be printed on a terminal: what is not printable, such as an escape character, is spelt out.

    >>> one_line("two\tcolumns")
    'two\\tcolumns'
    """
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


class CaptureError(DobnbError):
    """A model's attention cannot be streamed, or what it gave is not an attention matrix on the input's tokens."""


class UnsupportedModelError(CaptureError):
    """No attention that dobnb can read. Pass a model of transformers, timm, torchvision, torch or rtdl itself."""


class ArgumentError(CaptureError):
    """Inputs or a sink of a form that is not taken. Pass tensors, at least one input, and a sink of two arguments."""


class CompiledModelError(CaptureError):
    """Compiled code calls no sink. Pass the model as it was before ``torch.compile`` or ``torch.jit``."""


class TrainingModeError(CaptureError):
    """Dropout changes attention in training mode. Call ``model.eval()``."""


class KeptAttentionError(CaptureError):
    """The model is asked to keep every layer's attention. Leave ``output_attentions`` off; the sink receives it."""


class WindowedAttentionError(CaptureError):
    """Tokens attend within windows, so no matrix holds the whole input. Choose a model with global attention."""


class BatchError(CaptureError):
    """Not one attention matrix an input and a head: inputs are cut into parts, or mixed. Pass each part as an input."""


class CompressedAttentionError(CaptureError):
    """Linear, compressed or cached attention has no square matrix on the tokens. Choose a model with full softmax."""


class NoAttentionError(CaptureError):
    """No layer gave self-attention: it is of another kind, or attends to another sequence. Choose another model."""


class AmbiguousAttentionError(CaptureError):
    """To its own tokens or to another sequence? It cannot be told. Name the module ``self_attn`` or ``cross_attn``."""


class LayerCountError(CaptureError):
    """Fewer or more layers gave attention than the model has: some layer has an attention of another kind."""


class HalfPrecisionError(CaptureError):
    """Attention in half precision or under autocast is too coarse. Call ``model.float()`` and leave autocast off."""


class NotFiniteError(CaptureError):
    """Attention is NaN or infinite. Look for NaN in the inputs and the weights, and for overflow in half precision."""


class RowSumError(CaptureError):
    """Rows of attention do not sum to 1: it is no softmax over the tokens. There is no chain to measure."""


class MaskedRowError(CaptureError):
    """A token may attend to nothing. Mend the mask: every token that is no padding has to see another one or itself."""


class PaddingError(CaptureError):
    """Padding takes part, or layers disagree on what it is. Pass the tokenizer's mask, or one that the model heeds."""


class LengthError(CaptureError):
    """The input is longer than the model has positions. Cut it, as the tokenizer does with ``truncation=True``."""


class ImageSizeError(CaptureError):
    """The sides of the image are no multiples of the patch, so its edge would be lost. Crop or resize it."""


class CrossAttentionSkipped(UserWarning):
    """A layer attends to another sequence. No chain runs on one set of tokens there, so the sink does not get it."""
