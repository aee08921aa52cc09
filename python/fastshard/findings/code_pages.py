"""Pages of `fastshard explain` that extend the table of codes: the causes of a finding, and how to confirm
it."""

from __future__ import annotations

from typing import NamedTuple

from ..common import codes

__all__ = ["PAGES", "Page"]


class Page(NamedTuple):
    """Additional parts of a code's page."""

    #: Why it happens.
    why: str
    #: How to confirm it.
    confirm: str


PAGES = {
    codes.MISSING_FILE: Page(
        "Every node saved to its own local disk, a copy stopped early, or a download was filtered.",
        "`fastshard verify CKPT -v` lists each path and what requires it. Look for the file on the node "
        "that ran the rank.",
    ),
    codes.MISSING_TENSOR: Page(
        "A rank file was lost whose tensors no other file names, or the config describes a larger model.",
        "`fastshard ls CKPT` lists the tensors that exist. Compare the names with a good checkpoint: "
        "`fastshard diff CKPT GOOD`.",
    ),
    codes.MISSING_LAYER: Page(
        "The files of a pipeline stage are on another node, or the config states more layers than the model "
        "has.",
        "`fastshard ls CKPT --by layer` lists the layers that exist. Compare their number with the config.",
    ),
    codes.UNCOMMITTED: Page(
        "The job was stopped while it saved, or it is still saving.",
        "Look at the times of the files in the step. Check whether the training job is still running.",
    ),
    codes.TRACKER_POINTS_NOWHERE: Page(
        "The step was moved, deleted by a retention policy, or not copied with the tracker file. It is a "
        "warning next to a model that needs no step.",
        "Open the tracker file, and list the steps next to it.",
    ),
    codes.AMBIGUOUS: Page(
        "The directory holds several models or several formats of one model, or the config was not copied.",
        "`fastshard ls CKPT --tree` shows the prefixes of the names. The finding states what is undecided, "
        "and lists the choices if there are any.",
    ),
    codes.MIXED_STEPS: Page(
        "Files were collected from several nodes while training went on, or a copy was resumed a step later.",
        "The finding names the step of each file. Look at the times of the files.",
    ),
    codes.UNEXPECTED_FILE: Page(
        "Another run or another number of ranks saved to the same directory, and its files remained.",
        "Look at the times of the file and of its neighbours, and at the index.",
    ),
    codes.NOT_PROVABLE: Page(
        "There is no config.json, or fastshard has no layout for this model_type.",
        "Lines that begin with `not checked` name the tensors. Look for them in the code of the model.",
    ),
    codes.RANKS_DISAGREE: Page(
        "A rank file of an earlier run remained in the directory, or was copied there.",
        "The finding names the setting and both values. Look at the times of the files.",
    ),
    codes.MISSING_CHUNKS: Page(
        "The processes of the job did not write to shared storage. Or the writer leaves out chunks of zeros, "
        "and the files do not show which chunks it left out.",
        "List the directory that the finding names on the host that ran the process. The finding states how "
        "many chunks indicate zeros.",
    ),
    codes.STEP_TAKEN: Page(
        "Training keeps several steps in one directory.",
        "List the steps, and open the tracker file.",
    ),
    codes.RENAMED: Page(
        "A script that collected files from several nodes mixed up their names.",
        "`unzip -l FILE` shows the name under which torch.save wrote the archive. Megatron-LM keeps "
        "`args.rank` in the file.",
    ),
    codes.LOOKALIKES: Page(
        "The format stores no rank in its files: DCP, per-rank safetensors, chunks of arrays.",
        "Nothing in the files confirms it. Compare the files with hashes that were computed where the files "
        "were written.",
    ),
    codes.INDEX_NAMES_ANOTHER_FILE: Page(
        "Shards were renamed or written again, and the index of an earlier save remained.",
        "`fastshard trace CKPT TENSOR` names the file that holds a tensor. Look for the tensor's name in the "
        "index.",
    ),
    codes.MISSING_PART: Page(
        "transformers leaves MTP layers out when it loads a model, and saves the model without them. Or a "
        "script dropped the part.",
        "`fastshard ls CKPT --tree` shows the parts that exist. Look for the key that the finding names in "
        "config.json, and for the part in the original checkpoint.",
    ),
    codes.FILLED: Page(
        "--fill-from took entire parts that the checkpoint lacks, or --fill-only took single tensors.",
        "The manifest lists the names under `filled`. `fastshard diff OUT ORIGINAL --include 'NAME*'` "
        "compares them.",
    ),
    codes.PART: Page(
        "A script or shell completion passed the path of one file instead of its directory.",
        "`fastshard ls FILE` lists the tensors in the file. The help of the finding names the directory "
        "that holds the other parts.",
    ),
    codes.NOT_LOADED: Page(
        "A trainer saved its wrapper's names, or a script renamed tensors and left the config unchanged.",
        "from_pretrained prints which weights it initialises: every weight that it does not find. "
        "`fastshard ls CKPT` lists the names in the files.",
    ),
    codes.SHAPE: Page(
        "A file of another run or another number of ranks is in the directory.",
        "The finding gives both shapes. If one is a multiple of the other, the number of ranks differs.",
    ),
    codes.DTYPE: Page(
        "One rank was saved after a cast, or by a run with another precision.",
        "`fastshard ls CKPT --by dtype` counts the tensors of each dtype.",
    ),
    codes.AXIS_CONFLICT: Page(
        "A shard of one tensor is missing, or only one tensor was resized.",
        "The finding gives the shape of one tensor and the shape that the others require. Compare both with "
        "the config.",
    ),
    codes.NOT_DIVISIBLE: Page(
        "The heads, experts or rows cannot be divided evenly by the number of ranks.",
        "Divide the size that the finding gives by the number of ranks.",
    ),
    codes.HOLE: Page(
        "A rank died while it saved, or its file comes from an earlier save.",
        "The finding states where the existing chunks begin. Look for the rank that wrote the other chunks.",
    ),
    codes.OVERLAP: Page(
        "Files of two saves are in one directory.",
        "The finding names both files. Look at their times.",
    ),
    codes.UNKNOWN_TENSOR: Page(
        "The model has modules that the layout does not know, such as extra heads or adapters.",
        "`fastshard ls CKPT --glob NAME` shows the tensor. Look for it in the code of the model.",
    ),
    codes.SLICE_AS_WHOLE: Page(
        "The script that saved the model did not gather this tensor across the tensor-parallel ranks.",
        "The finding gives the number of rows or columns that are lost. Compare it with the sizes in the "
        "config.",
    ),
    codes.FACT_UNKNOWN: Page(
        "The training config was not saved with the checkpoint.",
        "The finding names the setting. Look for it in the config or the command line of the training run.",
    ),
    codes.BAD_LAYOUT: Page(
        "Your own layout has a syntax error, or two of its rules contradict each other.",
        "The finding gives the line or the entry.",
    ),
    codes.BAD_VALUE: Page(
        "A value does not fit this checkpoint, or was misspelt.",
        "The finding gives the option, its value and the values that are allowed.",
    ),
    codes.IGNORED: Page(
        "The target cannot store these tensors, or they are computed when the model is loaded.",
        "`-v` lists the tensors.",
    ),
    codes.UNBOUND_AXIS: Page(
        "The config was not saved with the checkpoint, and the tensor that would show the size is missing.",
        "The finding names the size. Look for it in the config of the training run.",
    ),
    codes.LOSSY: Page(
        "An option such as --dtype asked for it.",
        "`fastshard plan` lists the changes. `fastshard diff A B --ignore-dtype` shows how much the values "
        "changed.",
    ),
    codes.CONFIG_DISAGREES: Page(
        "The config is from another model, or was edited after the save.",
        "The finding gives what the config states and what the tensors show.",
    ),
    codes.DEFAULT_ASSUMED: Page(
        "The framework does not store settings that have their default value.",
        "The finding gives the key and the value that is written. Compare it with the command line of the "
        "training run.",
    ),
    codes.CRC: Page(
        "A disk or a network damaged the file, or a program wrote to it.",
        "`unzip -t FILE` reports the same member. Compare the file with the one on the node that wrote it.",
    ),
    codes.REPLICAS_DIFFER: Page(
        "A rank file is from another step, or ranks computed replicated tensors differently.",
        "The finding states how many elements differ and by how much. If ranks drifted apart, the "
        "differences are small and in many elements.",
    ),
    codes.DUPLICATED_SHARD: Page(
        "A copy or a rename went wrong, often in a shell loop.",
        "`cmp FILE OTHER` compares the two files. Look at the file on the node that wrote it.",
    ),
    codes.EQUAL_SHARDS: Page(
        "The tensor was initialised with a constant, or a rank, a layer or an expert was copied over another "
        "one.",
        "`fastshard stats CKPT --include NAME` shows whether the tensor is constant. `fastshard diff` with a "
        "good copy shows which layer changed.",
    ),
    codes.SWAPPED_SHARD: Page(
        "A script that collected files from several nodes mixed up their names.",
        "Compare the file with the one on the node that wrote it.",
    ),
    codes.NON_FINITE: Page(
        "Training diverged, a cast to a narrower dtype overflowed, or memory was damaged before the save.",
        "`fastshard stats CKPT --include NAME` counts NaN and infinite values. Look at the loss of that "
        "step.",
    ),
    codes.PAD_NOT_ZERO: Page(
        "The optimizer changed the padding rows, or tokens were added and vocab_size was not updated.",
        "Compare the number of rows with the size of the tokenizer.",
    ),
    codes.HASH: Page(
        "A disk or a network damaged the file, or somebody edited it.",
        "The finding gives both hashes. Compare the file with a good copy: `cmp FILE COPY`.",
    ),
    codes.DIFFERENT: Page(
        "The two are from different steps, runs or conversions.",
        "`fastshard diff A B -v` lists every tensor with its figures.",
    ),
    codes.REPLICAS_AVERAGED: Page(
        "--replicas mean asked for it.",
        "The finding gives the largest difference between the ranks.",
    ),
    codes.TIED_DIFFER: Page(
        "The head was trained separately, or the head or the embedding comes from another step.",
        "`fastshard diff` with a good copy shows which of the two changed.",
    ),
    codes.TRUNCATED: Page(
        "A copy or a download stopped early, or the disk was full.",
        "Compare the size of the file with that on the node that wrote it.",
    ),
    codes.ZERO_SLAB: Page(
        "A shard was lost before the tensors were merged, an expert was never written or loaded, or the "
        "tensor was pruned.",
        "`fastshard stats CKPT --include NAME` shows the rows or columns. Compare the tensor with a good "
        "copy.",
    ),
    codes.NO_CHECKSUMS: Page(
        "The training script turned checksums off to save faster.",
        "`unzip -v FILE` shows the CRC32 of each member as 00000000.",
    ),
    codes.SIGNATURE: Page(
        "A file was edited or damaged after it was signed, or the public key is from another signer.",
        "`model_signing verify key` reports the same file.",
    ),
    codes.NOT_WEIGHTS: Page(
        "The repository was cloned without Git LFS, or a download saved an error page.",
        "`head -c 200 FILE` shows text, but a weight file has binary data.",
    ),
    codes.UNWRITTEN: Page(
        "A copy set the file's length but stopped before it wrote the data, or a node died before its "
        "writes reached the disk.",
        "`du -h FILE` shows much less than `ls -lh FILE`. A result written with --sparse has holes on "
        "purpose, in place of zeros.",
    ),
    codes.UNTRAINED: Page(
        "Weights were not loaded before the save, heads were divided by another rule, or the model does not "
        "know the language or format of the text.",
        "`fastshard stats CKPT` shows tensors that look like a fresh initialisation. Run the trainer on the "
        "same tokens: `fastshard loss CKPT --tokens FILE --expect-loss X`.",
    ),
    codes.LOSS_DIFFERS: Page(
        "One tensor or one config setting was converted wrongly. Or the trainer computed the loss with "
        "dropout, with another BOS token, or on other tokens.",
        "`fastshard layers` names the layers that differ. Record the trainer's outputs with "
        "fastshard.integrations.record.",
    ),
    codes.OUTPUTS_DIFFER: Page(
        "Gate and up projections are swapped, heads are regrouped, a layer was copied over another, or the "
        "rotary base differs. If every layer differs, a setting is the cause.",
        "`fastshard diff A B --include 'model.layers.N.*'` compares the tensors of layer N.",
    ),
    codes.MASTERS_DIFFER: Page(
        "The parameters were loaded from elsewhere without the optimizer, or a rank file is from another "
        "step.",
        "`fastshard master-weights CKPT -v` lists the tensors with their largest difference.",
    ),
    codes.MASTERS_NOT_CHECKABLE: Page(
        "ZeRO stage 3 stores the weights once, and other stages may store no optimizer state.",
        "List the optimizer files of the step.",
    ),
    codes.WEIGHTS_TAKEN: Page(
        "Mixed-precision training keeps the weights in two precisions.",
        "`fastshard master-weights CKPT` compares the two.",
    ),
    codes.PARTITION: Page(
        "An optimizer file was lost or copied over another one, or the number of ranks changed.",
        "The finding names the rank, and the number of elements that it should hold.",
    ),
}
