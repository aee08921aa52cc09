//! The contents of a result's files around their tensors.

use std::sync::Arc;

use super::options::CHUNK;
use crate::codes;
use crate::engine::Control;
use crate::error::{Finding, Result};
use crate::files;
use crate::format::{torch_zip, Frame, Member};
use crate::memory;
use crate::plan::{Form, Output, Plan};
use crate::publish::OutFile;
use crate::storage::SourceFile;

/// The contents around the outputs of each file.
pub(crate) fn frames(plan: &Plan, by_file: &[Vec<usize>], sources: &[Arc<SourceFile>]) -> Result<Vec<Frame>> {
    let frame = |(file, inside): (&crate::plan::OutFile, &Vec<usize>)| {
        let outputs: Vec<&Output> = inside.iter().map(|&i| &plan.outputs[i]).collect();
        if let Form::Overlay(source) = file.form {
            return overlay(&sources[source as usize], &outputs, &file.zeros);
        }
        let (frame, offsets) = files::frame(file, &plan.metadata, &outputs)?;
        if frame.size != file.size || outputs.iter().zip(&offsets).any(|(o, at)| o.offset != *at) {
            return Err(Finding::new(codes::BAD_VALUE, "the plan does not fit the file's format")
                .file(&file.name)
                .into());
        }
        Ok(frame)
    };
    plan.files.iter().zip(by_file).map(frame).collect()
}

/// A copy of `source`: only the members that outputs and zeros lie in get another checksum.
fn overlay(source: &SourceFile, outputs: &[&Output], zeros: &[(u64, u64)]) -> Result<Frame> {
    let mut members = torch_zip::replaceable(source)?;
    let replaced: Vec<(u64, u64)> =
        outputs.iter().map(|o| (o.offset, o.nbytes())).chain(zeros.iter().copied()).collect();
    let within = |m: &Member, (at, len): (u64, u64)| m.offset <= at && at + len <= m.offset + m.len;
    if let Some(i) = replaced.iter().position(|r| !members.iter().any(|m| within(m, *r))) {
        return Err(Finding::new(codes::UNSUPPORTED, "its bytes cannot be replaced in place")
            .file(source.path())
            .tensor(outputs.get(i).map_or("data.pkl", |o| o.key()))
            .help("save the file again with torch.save; the member is compressed")
            .into());
    }
    members.retain(|m| replaced.iter().any(|r| within(m, *r)));
    let pieces =
        zeros.iter().map(|&(at, len)| Ok((at, memory::allocate(len as usize)?))).collect::<Result<_>>()?;
    Ok(Frame { pieces, members, size: source.size() })
}

/// Copies what nothing replaces from the source of an overlay.
pub(super) fn underlay(
    source: &SourceFile,
    outputs: &[&Output],
    zeros: &[(u64, u64)],
    out: &OutFile,
    control: &Control,
) -> Result<()> {
    let mut taken: Vec<(u64, u64)> = outputs.iter().map(|o| (o.offset, o.offset + o.nbytes())).collect();
    taken.extend(zeros.iter().map(|&(at, len)| (at, at + len)));
    taken.push((source.size(), source.size()));
    taken.sort_unstable();
    let mut bytes = memory::allocate(CHUNK as usize)?;
    let mut at = 0;
    for (lo, hi) in taken {
        while at < lo {
            control.check_running()?;
            let n = CHUNK.min(lo - at) as usize;
            source.read_at(at, &mut bytes[..n])?;
            out.write_all_at(at, &bytes[..n])?;
            at += n as u64;
        }
        at = at.max(hi);
    }
    Ok(())
}
