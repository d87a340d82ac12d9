"""What makes a folder the directory of one run, as it was when the run was started; and a place if that is lost.

Somebody may delete or replace a run's directory while the run trains. What it writes afterwards would be in no run, or
in another one.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.atomic_files import write_text
from paceline.checkpoint.run_directory import RUN, SETTINGS, is_run_directory
from paceline.errors import CheckpointError
from paceline.text import first_line


@dataclass(frozen=True)
class RunFiles:
    """The files that say what a run is; pickles.

    Attributes:
        run_dir: of the run.
        texts: content by name; empty where the folder is no run's.
    """

    run_dir: Path
    texts: Mapping[str, str]

    @classmethod
    def of(cls, run_dir: Path) -> RunFiles:
        """Those of a run directory, as they are now."""
        names = (RUN, SETTINGS) if is_run_directory(run_dir) else ()
        return cls(run_dir, {name: (run_dir / name).read_text(encoding="utf-8") for name in names})

    def lost(self) -> str | None:
        """What somebody has done to the run directory meanwhile, in a line; None where it is the same run's."""
        if not self.texts:
            return None
        path = self.run_dir / RUN
        try:
            same = path.read_text(encoding="utf-8") == self.texts[RUN]
        except (FileNotFoundError, NotADirectoryError):
            gone = path if self.run_dir.is_dir() else self.run_dir
            return f"{gone}: was removed while the run trained"
        except UnicodeDecodeError:
            same = False
        except OSError:  # a disk that does not answer now; writing to it says so
            return None
        return None if same else f"{path}: was replaced by another run's while the run trained"

    def rescue(self) -> Path:
        """A new run directory with these files, beside the lost one or in the folder for temporary files.

        Raises:
            CheckpointError: neither place takes files.
        """
        reasons = []
        for place in (self.run_dir.absolute().parent, Path(tempfile.gettempdir())):
            try:
                folder = Path(tempfile.mkdtemp(prefix=f"{self.run_dir.name}.rescued-", dir=place))
                for name, text in self.texts.items():
                    write_text(folder / name, text, private=True)
                return folder
            except OSError as error:
                reasons.append(f"{place}: {first_line(error)}")
        raise CheckpointError(f"the state could not be saved elsewhere ({', '.join(reasons)})")
