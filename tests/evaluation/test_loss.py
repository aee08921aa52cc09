"""The loss of a checkpoint from its shards: the trainer's own, and what is found."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fastshard
import numpy as np
import pytest
import torch
import transformers
from fastshard.evaluation import layerwise_model, token_batches
from fastshard.evaluation.layerwise_model import LayerwiseModel
from helpers import cli
from safetensors.torch import save_file
from tiny_models import model
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from trained_models import VOCABULARY, damaged, make_tokens, trained

TOKENS = make_tokens(8, 16, seed=999)


def loss_of(folder: Path, tokens: torch.Tensor) -> float:
    """What transformers computes."""
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        return float(loaded(input_ids=tokens, labels=tokens).loss)


def refuse(code: str, call: Callable[[], object]) -> fastshard.Finding:
    """The finding with which a call is refused."""
    with pytest.raises(fastshard.FastshardError) as error:
        call()
    [finding] = [finding for finding in error.value.findings if finding.severity == "error"]
    assert finding.code == code, error.value
    return finding


def with_tokenizer(folder: Path, *, bos: bool) -> None:
    """A tokenizer whose words are single letters; others are the first token."""
    words = {chr(ord("a") + at): at + 1 for at in range(26)} | {"<unk>": 0, "<s>": 27}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 27)])
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(
        folder
    )


@pytest.mark.parametrize(
    ("to", "options"),
    [
        ("hf", {}),
        ("megatron", {"tp": 2}),
        ("megatron:torch_dist", {"tp": 2, "pp": 2}),
        ("dcp", {}),
        ("tp-safetensors", {"tp": 2}),
        ("gpt_neox", {"tp": 2}),
        ("maxtext", {}),
    ],
)
def test_every_source_has_the_loss_of_the_converted_model(
    to: str, options: dict[str, Any], tmp_path: Path
) -> None:
    name = "gpt_neox" if to == "gpt_neox" else "llama"
    made = model(name, tmp_path / "hf")
    fastshard.convert(tmp_path / "hf", tmp_path / "run", to=to, **options)
    tokens = torch.randint(0, 200, (3, 20), generator=torch.Generator().manual_seed(1))
    measured = fastshard.loss(tmp_path / "run", tokens=tokens, vocab_size=200)
    with torch.no_grad():
        assert measured.loss == pytest.approx(float(made(input_ids=tokens, labels=tokens).loss), abs=1e-5)
    assert (measured.tokens, measured.sequences) == (57, 3)
    # The logits are those of the converted model, bit for bit.
    fastshard.convert(tmp_path / "run", tmp_path / "converted", to="hf", vocab_size=200)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "converted").eval()
    for parameter in loaded.parameters():
        # Where weights lie in memory decides how a processor adds: not where a mapped file has them.
        parameter.data = parameter.data.clone()
    view = fastshard.open(tmp_path / "run", to="hf", vocab_size=200)
    with torch.no_grad():
        assert torch.equal(LayerwiseModel(view).run(tokens), loaded(input_ids=tokens).logits)


def test_a_trained_model_has_its_loss_and_nothing_to_report() -> None:
    measured = fastshard.loss(trained(), tokens=TOKENS)
    assert measured.loss == pytest.approx(loss_of(trained(), TOKENS), abs=1e-6)
    assert measured.ok and not measured.findings
    assert measured.untrained == pytest.approx(math.log(VOCABULARY))
    assert measured.perplexity == pytest.approx(math.exp(measured.loss))
    assert 0 < measured.standard_error < 0.5
    assert measured.not_checked


def test_an_expected_loss_is_a_gate(tmp_path: Path) -> None:
    (tmp_path / "tokens.json").write_text(json.dumps(TOKENS.tolist()))
    command = ("loss", trained(), "--tokens", tmp_path / "tokens.json")
    right = loss_of(trained(), TOKENS)
    ran = cli(*command, "--expect-loss", f"{right:.4f}", "--json")
    assert (ran.code, ran.doc["verdict"]) == (0, "OK")
    assert ran.doc["loss"] == pytest.approx(right, abs=1e-6)
    assert cli(*command, "--expect-loss", f"{right + 0.5:.4f}", "--json").having("FS319")
    assert cli(*command, "--expect-loss", f"{right + 0.5:.4f}").code == 1
    assert cli(*command, "--expect-loss", f"{right + 0.5:.4f}", "--tolerance", "0.6").code == 0
    assert cli(*command, "--tolerance", "0.6").code == 2


@pytest.mark.parametrize(
    "options",
    [
        {"expect_loss": math.nan},
        {"expect_loss": 1.0, "tolerance": math.nan},
        {"expect_loss": 1.0, "tolerance": math.inf},
        {"expect_loss": 1.0, "tolerance": -0.1},
    ],
)
def test_a_gate_of_what_is_no_number_is_refused(options: dict[str, float]) -> None:
    refuse("FS515", lambda: fastshard.loss(trained(), tokens=TOKENS, **options))  # type: ignore[arg-type]


def test_tokens_that_were_left_out_are_named_where_the_loss_differs() -> None:
    tokens = make_tokens(8, 40, seed=5)
    [finding] = fastshard.loss(trained(), tokens=tokens, sequence_length=16, expect_loss=1.0).findings
    assert finding.code == "FS319" and "192 tokens were left out" in str(finding.help)
    [finding] = fastshard.loss(trained(), tokens=tokens, expect_loss=1.0).findings
    assert finding.help is None


def test_one_token_has_a_loss_without_a_standard_error(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text("[1, 2]")
    done = cli("loss", trained(), "--tokens", tmp_path / "t.json", "--json")
    assert done.doc["standard_error"] is None and done.code == 1


def test_a_loss_as_of_an_untrained_model_is_an_error(tmp_path: Path) -> None:
    torch.manual_seed(1)
    untrained = damaged(
        tmp_path / "m", lambda t: t.update({n: torch.randn_like(x) * 0.02 for n, x in t.items()})
    )
    measured = fastshard.loss(untrained, tokens=TOKENS)
    assert [(f.code, f.severity) for f in measured.findings] == [("FS318", "error")]
    assert not measured.ok
    # Whoever expects it says so.
    assert fastshard.loss(untrained, tokens=TOKENS, expect_loss=measured.loss).ok


def test_a_loss_worse_than_the_frequencies_of_the_tokens_is_a_warning(tmp_path: Path) -> None:
    tokens = make_tokens(8, 16, seed=5) // 8
    measured = fastshard.loss(trained(), tokens=tokens)
    assert measured.by_frequency < measured.loss < 0.9 * measured.untrained
    assert [(f.code, f.severity) for f in measured.findings] == [("FS318", "warning")]
    assert not fastshard.loss(trained(), tokens=tokens, fail_on="warning").ok


def test_a_loss_that_is_no_number_is_an_error_whatever_was_expected(tmp_path: Path) -> None:
    broken = damaged(tmp_path / "m", lambda t: t["model.norm.weight"].fill_(torch.inf))
    for expect in (None, 1.6):
        measured = fastshard.loss(broken, tokens=TOKENS, expect_loss=expect, accept=["non-finite"])
        assert [f.code for f in measured.findings if f.severity == "error"] == ["FS318"]
    assert measured.to_dict()["loss"] is None


@pytest.mark.parametrize("bos", [False, True])
def test_a_text_is_divided_by_the_tokenizer_of_the_checkpoint(bos: bool, tmp_path: Path) -> None:
    folder = damaged(tmp_path / "m")
    with_tokenizer(folder, bos=bos)
    (tmp_path / "text").write_text("abcdefgh" * 5)
    measured = fastshard.loss(folder, text=tmp_path / "text", sequence_length=16)
    # 15 letters after each BOS token; the last 10 letters fill no sequence.
    rows = [
        [27] * bos + [ord(c) - ord("a") + 1 for c in ("abcdefgh" * 5)[at : at + 16 - bos]]
        for at in (0, 16 - bos)
    ]
    tokens = torch.tensor(rows)
    assert (measured.sequences, measured.tokens) == (2, 30)
    assert measured.loss == pytest.approx(loss_of(folder, tokens), abs=1e-6)
    # Without a text, the page in the package.
    assert fastshard.loss(folder).text == "the page of text in the package"


def test_the_page_of_text_has_enough_words_for_the_default_batch() -> None:
    text = token_batches._read_sample()
    assert text.isascii() and len(text.split()) > 800


@pytest.mark.parametrize("ending", ["json", "npy", "safetensors", "list", "array"])
def test_token_ids_come_in_files_and_arrays(ending: str, tmp_path: Path) -> None:
    file = tmp_path / f"tokens.{ending}"
    given: Any = file
    if ending == "json":
        file.write_text(json.dumps({"input_ids": TOKENS.tolist()}))
    elif ending == "npy":
        np.save(file, TOKENS.numpy().astype("uint16"))
    elif ending == "safetensors":
        save_file({"tokens": TOKENS.to(torch.int32)}, file)
    else:
        given = TOKENS.tolist() if ending == "list" else TOKENS.numpy()
    assert fastshard.loss(trained(), tokens=given).loss == fastshard.loss(trained(), tokens=TOKENS).loss


def test_ids_in_one_dimension_are_divided_into_sequences() -> None:
    flat = TOKENS.flatten()
    assert (
        fastshard.loss(trained(), tokens=flat, sequence_length=16).loss
        == fastshard.loss(trained(), tokens=TOKENS).loss
    )
    some = fastshard.loss(trained(), tokens=flat, sequence_length=16, max_tokens=40)
    assert (some.sequences, some.tokens) == (2, 30)


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ([1], "two tokens"),
        ([], "not token ids"),
        ([[1, 2], [3]], "not token ids"),
        ([0.5, 1.5], "not token ids"),
        (["a", "b"], "not token ids"),
        ([[[1, 2]]], "not token ids"),
        ([True, False, True], "not token ids"),
        ([1, -1, 2], "outside the model's embedding"),
        ([1, VOCABULARY, 2], "outside the model's embedding"),
    ],
)
def test_what_are_no_token_ids_is_refused(tokens: Any, words: str) -> None:
    finding = refuse("FS211", lambda: fastshard.loss(trained(), tokens=tokens))
    assert words in finding.message


@pytest.mark.parametrize("name", ["t.json", "t.npy", "t.safetensors", "t.pt"])
def test_a_damaged_file_of_token_ids_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"\x80\x04}q")
    finding = refuse("FS211", lambda: fastshard.loss(trained(), tokens=tmp_path / name))
    assert finding.file == str(tmp_path / name)


def test_a_pickle_in_an_npy_file_is_not_executed(tmp_path: Path) -> None:
    np.save(tmp_path / "t.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    refuse("FS211", lambda: fastshard.loss(trained(), tokens=tmp_path / "t.npy"))


def test_refusals_say_what_to_do(tmp_path: Path) -> None:
    refuse("FS209", lambda: fastshard.loss(trained()))
    refuse("FS515", lambda: fastshard.loss(trained(), text=tmp_path / "t", tokens=[1, 2]))
    refuse("FS501", lambda: fastshard.loss(trained(), text=tmp_path / "t", tokenizer=None))
    refuse("FS515", lambda: fastshard.loss(trained(), tokens=TOKENS, tolerance=0.1))
    bert = transformers.BertForMaskedLM(
        transformers.BertConfig(
            vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
        )
    )
    bert.save_pretrained(tmp_path / "bert")
    finding = refuse("FS514", lambda: fastshard.loss(tmp_path / "bert", tokens=[1, 2, 3]))
    assert "causal language model" in finding.message


def test_a_memory_limit_refuses_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = LayerwiseModel(fastshard.open(trained(), to="hf"))
    model.check_memory(None, 128)
    model.check_memory(model.estimate_memory(128) + (64 << 20), 128)
    assert model.estimate_memory(100_000) > model.estimate_memory(128)
    finding = refuse("FS512", lambda: model.check_memory(1 << 20, 128))
    assert "MiB for 128 tokens" in str(finding.expected)
    monkeypatch.setattr(LayerwiseModel, "run", None)
    monkeypatch.setattr(LayerwiseModel, "estimate_memory", lambda self, tokens, **_: 1 << 45)
    refuse("FS512", lambda: fastshard.loss(trained(), tokens=TOKENS, memory="64GiB"))


def test_a_lost_tensor_of_the_model_is_refused(tmp_path: Path) -> None:
    # Without its index and config nothing promises it but the class.
    folder = damaged(tmp_path / "m", lambda t: t.pop("model.layers.1.self_attn.q_norm.weight"))
    refuse("FS102", lambda: fastshard.loss(folder, tokens=TOKENS))
    view = fastshard.open(trained(), to="hf")
    names = [name for name in view if name != "model.layers.1.mlp.up_proj.weight"]
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patch:
        patch.setattr(type(view), "__iter__", lambda self: iter(names))
        finding = refuse("FS102", lambda: LayerwiseModel(view))
    assert finding.tensor == "model.layers.1.mlp.up_proj.weight"


def test_a_tensor_that_the_model_has_no_place_for_is_refused(tmp_path: Path) -> None:
    folder = damaged(tmp_path / "m", lambda t: t.update({"model.layers.0.more.weight": torch.ones(3)}))
    with pytest.raises(fastshard.FastshardError) as error:
        LayerwiseModel(fastshard.open(folder, to="hf"))
    assert error.value.findings[0].code in ("FS108", "FS207")


def test_a_transformers_without_the_loader_is_refused_by_version(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers.core_model_loading as loading

    monkeypatch.delattr(loading, "convert_and_load_state_dict_in_model")
    finding = refuse("FS514", lambda: fastshard.loss(trained(), tokens=TOKENS))
    assert transformers.__version__ in finding.message


def test_a_layer_that_is_given_a_meta_tensor_is_refused() -> None:
    lm = LayerwiseModel(fastshard.open(trained(), to="hf"))
    lm.layers[0].module.register_forward_hook(lambda module, args, output: output.to("meta"))
    finding = refuse("FS514", lambda: lm.run(TOKENS))
    assert "model.layers.1 gets a tensor on the meta device" in finding.message
    lm = LayerwiseModel(fastshard.open(trained(), to="hf"))
    lm.model.lm_head.register_forward_hook(lambda module, args, output: output.to("meta"))
    refuse("FS514", lambda: lm.run(TOKENS))


def test_what_transformers_raises_is_a_finding() -> None:
    lm = LayerwiseModel(fastshard.open(trained(), to="hf"))

    def fail(module: object, args: object) -> None:
        raise RuntimeError("of a class of its own")

    lm.layers[0].module.mlp.register_forward_pre_hook(fail)
    finding = refuse("FS514", lambda: lm.run(TOKENS))
    assert "of a class of its own" in finding.message


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
@pytest.mark.parametrize("load", [fastshard.loss, fastshard.load_model])
def test_a_config_chooses_no_code(
    load: Callable[..., object], key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []
    monkeypatch.setattr(
        "transformers.modeling_utils.lazy_import_flash_attention", lambda *args, **_: calls.append(args)
    )
    folder = damaged(tmp_path / "m", **{key: "kernels-community/flash-attn2"})
    load(folder, **({"tokens": TOKENS} if load is fastshard.loss else {}))
    assert calls == [], "transformers downloads and runs it"


@pytest.mark.parametrize(
    "settings", [{"hidden_act": "none"}, {"rope_parameters": {"rope_type": "yarn"}}, {"rms_norm_eps": "x"}]
)
def test_a_config_that_the_class_does_not_take_is_refused(settings: dict[str, Any], tmp_path: Path) -> None:
    finding = refuse("FS514", lambda: fastshard.loss(damaged(tmp_path / "m", **settings), tokens=TOKENS))
    assert "cannot be built from the config" in finding.message


@pytest.mark.parametrize("device", ["none", "meta", "mps:7", "ipu"])
def test_a_device_that_is_not_there_is_refused(device: str) -> None:
    refuse("FS515", lambda: fastshard.loss(trained(), tokens=TOKENS, device=device))
    assert fastshard.loss(trained(), tokens=TOKENS, device=torch.device("cpu")).ok  # type: ignore[arg-type]


def test_threads_leave_torch_as_it_was() -> None:
    register = torch.nn.Module.register_parameter
    inside, outside = threading.Event(), threading.Event()
    built: list[torch.nn.Module] = []

    def build() -> None:
        with layerwise_model._parameters_on_meta():
            inside.set()
            assert outside.wait(60)
            built.append(torch.nn.Linear(2, 2))

    def build_again() -> None:
        with layerwise_model._parameters_on_meta():
            built.append(torch.nn.Linear(2, 2))

    first, second = threading.Thread(target=build), threading.Thread(target=build_again)
    first.start()
    assert inside.wait(60)
    second.start()
    second.join(0.2)
    assert not torch.nn.Linear(2, 2).weight.is_meta, "of a thread that builds a model of its own"
    outside.set()
    first.join()
    second.join()
    assert [one.weight.is_meta for one in built] == [True, True]  # type: ignore[union-attr]
    assert torch.nn.Module.register_parameter is register


def test_sequences_are_no_longer_than_the_model_takes() -> None:
    # It states 64 positions.
    assert fastshard.loss(trained(), tokens=make_tokens(2, 200, seed=1)).tokens == 2 * 63


def test_the_private_functions_of_transformers_are_there() -> None:
    """source: transformers 5.24; without one of them `loss` refuses to run."""
    assert vars(layerwise_model._import_loading()).keys() == {
        "WeightConverter",
        "WeightRenaming",
        "LoadStateDictConfig",
        "convert_and_load_state_dict_in_model",
        "dot_natural_key",
        "get_model_conversion_mapping",
        "rename_source_key",
    }


def test_progress_counts_the_bytes_of_all_weights() -> None:
    seen: list[tuple[int, int]] = []
    fastshard.loss(trained(), tokens=TOKENS, progress=lambda done, total: seen.append((done, total)))
    size = sum(tensor.nbytes for tensor in fastshard.open(trained()).values())
    assert {total for _, total in seen} == {size}
    # The embedding was loaded before.
    assert seen[-1][0] == size - fastshard.open(trained())["model.embed_tokens.weight"].nbytes


def test_a_conversion_checks_the_loss_before_it_writes(tmp_path: Path) -> None:
    (tmp_path / "tokens.json").write_text(json.dumps(TOKENS.tolist()))
    fastshard.convert(trained(), tmp_path / "run", to="dcp")
    right = loss_of(trained(), TOKENS)
    options = ("--to", "hf", "--check-loss", tmp_path / "tokens.json")
    command = ("convert", tmp_path / "run", tmp_path / "out", *options)
    wrong = cli(*command, "--expect-loss", f"{right + 1:.4f}")
    assert wrong.code == 1 and wrong.having("FS319")
    assert not (tmp_path / "out").exists()
    assert cli(*command, "--expect-loss", f"{right:.4f}").code == 0
    record = json.loads((tmp_path / "out/fastshard.manifest.json").read_text())["values"]["loss"]
    assert record["loss"] == pytest.approx(right, abs=1e-5)
    assert (record["model_class"], record["tokens"]) == ("Qwen3ForCausalLM", 120)
    # Without an expected loss, and for people.
    ran = cli(
        "convert", tmp_path / "run", tmp_path / "again", *options, "--memory", "4GiB", json_output=False
    )
    assert ran.code == 0 and f"loss {right:.4f}" in ran.out


@pytest.mark.parametrize(
    "options",
    [
        ("--to", "dcp", "--check-loss", "tokens.json"),
        ("--to", "hf", "--expect-loss", "2"),
        ("--to", "hf", "--check-loss", "tokens.json", "--rank", "0", "--world", "2"),
        ("--to", "hf", "--check-loss", "tokens.json", "--ray", "local"),
    ],
)
def test_a_loss_that_cannot_be_checked_is_refused(options: tuple[str, ...], tmp_path: Path) -> None:
    ran = cli("convert", trained(), tmp_path / "out", *options)
    assert ran.code == 2 and ran.having("FS515")
    assert not (tmp_path / "out").exists()


def test_a_loss_that_is_no_number_prevents_a_conversion(tmp_path: Path) -> None:
    (tmp_path / "tokens.json").write_text(json.dumps(TOKENS.tolist()))
    broken = damaged(tmp_path / "m", lambda t: t["model.norm.weight"].fill_(torch.inf))
    options = ("--accept", "non-finite", "--to", "hf", "--check-loss", tmp_path / "tokens.json")
    ran = cli("convert", broken, tmp_path / "out", *options)
    assert ran.code == 1 and ran.having("FS318", message="not a number")
    ran = cli(
        "loss", broken, "--tokens", tmp_path / "tokens.json", "--accept", "non-finite", json_output=False
    )
    assert ran.code == 1 and "nan" in ran.out


def test_a_report_shows_the_loss_that_the_conversion_computed(tmp_path: Path) -> None:
    (tmp_path / "tokens.json").write_text(json.dumps(TOKENS.tolist()))
    fastshard.convert(trained(), tmp_path / "out", to="hf", check_loss=tmp_path / "tokens.json")
    assert f"loss {loss_of(trained(), TOKENS):.4f}" in fastshard.report(tmp_path / "out")
    # A manifest is anybody's: one that says something else is no reason to fail.
    file = tmp_path / "out/fastshard.manifest.json"
    document = json.loads(file.read_text())
    for record in (7, {"loss": "x"}, {"loss": None}):
        document["values"]["loss"] = record
        file.write_text(json.dumps(document))
        assert "No hash shows this. Compare the loss" in fastshard.report(tmp_path / "out")


@pytest.mark.parametrize("kind", ["bert", "xlnet"])
def test_a_model_that_sees_the_next_token_is_refused(kind: str, tmp_path: Path) -> None:
    small = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.AutoConfig.for_model(
        kind, **small, intermediate_size=16, d_model=16, n_layer=1, n_head=2
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert "causal" in refuse("FS514", lambda: fastshard.loss(tmp_path, tokens=[1, 2, 3])).message
    if kind == "bert":
        config.is_decoder = True
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
        assert fastshard.loss(tmp_path, tokens=[1, 2, 3]).tokens == 2
