"""Files of a folder with data: images by name, splits by words in names, names of classes."""

import os
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Optional

from ..images.formats import IMAGE_ENDINGS
from ..tooling.command import UserError, one_line
from ..tooling.files import files_below
from .defects import Defects

# Words in the names of files and folders that tell what a split is for.
SPLITS = {
    'train': {'train', 'training', 'trainval', 'tr'},
    'val': {'val', 'valid', 'validation', 'dev', 'eval'},
    'test': {'test', 'testing'},
}
WORD = re.compile('[A-Z]+(?![a-z])|[A-Z]?[a-z]+')
# Folders of label maps, which have the names of images: those of VOC, and words in those of others.
LABEL_MAP_FOLDERS = {'SegmentationClass', 'SegmentationObject'}
LABEL_MAP_WORDS = {'mask', 'masks'}
# Files with a class name in each line, as tools for YOLO and label maps write them.
NAME_FILES = ('classes.txt', 'obj.names', 'labels.txt', 'names.txt', '_darknet.labels', 'codes.txt')
# Results of Ultralytics' tools, which look like labelled images.
RESULTS = re.compile(r'(^|/)runs/(detect|segment|pose|obb|classify|train|val)/')
GENERATED = '_data'  # end of the name of the folder that is written next to a config


class NotRecognized(UserError):
    """A folder has no data in a known layout."""

    def __init__(self, root: Path, reason: str = '') -> None:
        super().__init__(
            f'{root} must have boxes for a detector (COCO: a JSON file; YOLO: data.yaml or '
            'labels/*.txt; Pascal VOC: *.xml) or segmentation masks for a segmentor (images/ '
            f'and masks/, or a.jpg and a_mask.png){reason}'
        )


class Files:
    """The files below a folder, without hidden ones and those that new_config wrote.

    `assigned` gives the splits of some folders or files, by name or path, whatever their names say.
    """

    def __init__(self, root: Path, assigned: Optional[Mapping[str, str]] = None) -> None:
        if root.is_file():
            raise UserError(f'the data must be a folder, got the file {root}')
        if not root.is_dir():
            raise UserError(f'no folder {root}')
        self.root = root
        self.assigned = dict(assigned or {})
        self._splits: dict[str, tuple[Optional[str], str]] = {}  # by path, as they are asked for
        paths = [path for path in files_below(root) if path.is_file()]  # no pipes, no broken links
        every = [path.relative_to(root).as_posix() for path in paths]
        self.undecodable = [name for name in every if not is_utf8(name)]
        names = [name for name in every if is_utf8(name)]
        generated = [name.removesuffix('.py') + GENERATED for name in names if name[-3:] == '.py']
        skipped = tuple(f'{folder}/' for folder in generated)
        names = [n for n in names if not n.startswith(skipped) and not RESULTS.search(n)]
        self.names = sorted(names, key=lambda name: (name.count('/'), name))  # the root's first
        if not names:
            raise UserError(f'{root} is empty')
        self.images = self.with_suffix(*IMAGE_ENDINGS)
        # Paths of images by comparable path, and by that without suffix.
        self._images: dict[str, str] = {}
        self._stems: dict[str, str] = {}
        for name in self.images:
            if not LABEL_MAP_FOLDERS & {*name.split('/')}:
                path = comparable(name)
                self._images[path] = name
                self._stems.setdefault(str(PurePosixPath(path).with_suffix('')), name)
        self._by_last_parts: dict[int, dict[str, list[str]]] = {}
        if self.assigned:
            self._check_assigned()

    def _check_assigned(self) -> None:
        known = set()
        for name in self.names:
            for place in with_parents(name):
                known |= {str(place), place.name, place.stem}
        for name in self.assigned:
            if name not in known:
                raise UserError(f'--assign {name}: {self.root} has no folder or file of this name')

    def warn(self, defects: Defects) -> None:
        """Warn about files whose names are no text, which no annotation or config can name."""
        for name in self.undecodable:
            shown = name.encode('utf-8', 'backslashreplace').decode()
            defects.warn('files whose names are not UTF-8: left out', shown)

    def with_suffix(self, *suffixes: str) -> list[str]:
        return [name for name in self.names if PurePosixPath(name).suffix.lower() in suffixes]

    def split_of(self, path: str) -> Optional[str]:
        """What a file or folder is for: as assigned, or as its name or those of its parents say."""
        return self._known_split(path)[0]

    def splits_by_name(self, paths: Iterable[str]) -> dict[str, str]:
        """The files and folders whose names say the split of some paths, with it."""
        found = {}
        for path in paths:
            split, place = self._known_split(path)
            if place and split:
                found[place] = split
        return found

    def assigned_split(self, path: str) -> Optional[str]:
        if not self.assigned:
            return None
        for place in with_parents(path):
            for name in (str(place), place.name, place.stem):
                if name in self.assigned:
                    return self.assigned[name]
        return None

    def _known_split(self, path: str) -> tuple[Optional[str], str]:
        if path not in self._splits:
            self._splits[path] = self._split_and_reason(path)
        return self._splits[path]

    def _split_and_reason(self, path: str) -> tuple[Optional[str], str]:
        """A split, and the folder or file whose name says it; '' if it is assigned."""
        assigned = self.assigned_split(path)
        if assigned is not None:
            return assigned, ''
        for place in with_parents(path):
            split = split_of(place.name)
            if split is not None:
                return split, str(place)
        return None, ''

    def find_images(
        self, names: Sequence[str], annotations: str, by_stem: bool = False
    ) -> list[Optional[str]]:
        """The images that a file of annotations names, relative to the root; None: it is missing.

        All of them are below one folder, and the names are relative to it, perhaps after folders of
        another machine. A folder that has the first of the images is searched for; if there are
        several, the one that has all images counts.

        Args:
            names: paths or names of images.
            annotations: path of the file of annotations. Folders of another split and of masks are
                not searched, unless no other has an image.
            by_stem: the names have no suffix, and the images can have any.

        Raises:
            UserError: several folders have images of these names.
        """
        known = self._stems if by_stem else self._images
        paths = [PurePosixPath(comparable(name.replace('\\', '/'))).parts for name in names]
        shared = os.path.commonprefix([parts[:-1] for parts in paths if parts])
        for in_any_folder in (False, True):
            for skipped in range(len(shared) + 1):
                wanted = ['/'.join(parts[skipped:]) for parts in paths]
                folders = self._folders_of_first(wanted, known, annotations, in_any_folder)
                if folders:
                    return self._images_below(folders, wanted, known, annotations)
        return [None] * len(names)

    def _folders_of_first(
        self,
        wanted: Sequence[str],
        known: Mapping[str, str],
        annotations: str,
        in_any_folder: bool,
    ) -> list[str]:
        """The folders that have the first image that any folder has, of some relative paths."""
        split = self.split_of(annotations)
        for name in wanted:
            paths = self._with_last_parts(name.count('/') + 1).get(name, [])
            folders = [path.removesuffix(name).rstrip('/') for path in paths if path in known]
            if not in_any_folder:
                folders = [folder for folder in folders if self._is_likely(folder, split)]
            if folders:
                return folders
        return []

    def _is_likely(self, folder: str, split: Optional[str]) -> bool:
        """Whether a folder can have the images of a split, by the words in its name."""
        of_split = split is None or self.split_of(folder) in (split, None)
        return of_split and not words(folder) & LABEL_MAP_WORDS

    def _with_last_parts(self, count: int) -> dict[str, list[str]]:
        """The paths of images, with and without suffix, by their last `count` parts."""
        if count not in self._by_last_parts:
            found = self._by_last_parts[count] = defaultdict(list)
            for path in {**self._images, **self._stems}:
                found['/'.join(path.split('/')[-count:])].append(path)
        return self._by_last_parts[count]

    def _images_below(
        self,
        folders: Sequence[str],
        wanted: Sequence[str],
        known: Mapping[str, str],
        annotations: str,
    ) -> list[Optional[str]]:
        """The images below the only folder, or the only one that has them all."""
        found = {path: [known.get(join(path, name)) for name in wanted] for path in folders}
        complete = [images for images in found.values() if None not in images]
        if len(found) == 1:
            return found[folders[0]]
        if len(complete) == 1:
            return complete[0]
        shown = [
            f'{folder or "."} ({len(images) - images.count(None)} of {len(images)})'
            for folder, images in sorted(found.items())[:3]
        ]
        if known is self._stems:
            advice = 'put the annotations next to their images'
        else:
            example = join(sorted(found)[0], 'a.jpg')
            advice = f'let the names in the file begin with the folder, as in {example}'
        raise UserError(
            f'{self.root}: the images of {annotations or "."} are in several folders: '
            f'{", ".join(shown)}; keep one of them, or {advice}'
        )

    def has_image(self, stem: str) -> bool:
        """Whether there is an image of this name, anywhere and with any suffix."""
        paths = self._with_last_parts(1).get(comparable(stem), [])
        return any(path in self._stems for path in paths)


def join(folder: str, name: str) -> str:
    return f'{folder}/{name}' if folder else name


def is_utf8(name: str) -> bool:
    """Whether the name of a file is text; Python reads other bytes as surrogates."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def with_parents(path: str) -> list[PurePosixPath]:
    """A path and the folders above it, without that of the data."""
    place = PurePosixPath(path)
    return [p for p in (place, *place.parents) if p.name]


def assigned_splits(entries: Iterable[str]) -> dict[str, str]:
    """The splits of folders and files, from entries FOLDER=SPLIT of a command line."""
    assigned = {}
    for entry in entries:
        name, separator, split = entry.rpartition('=')
        if not name.strip('/') or not separator or split not in SPLITS:
            raise UserError(f'--assign takes FOLDER=train, val or test, got {entry!r}')
        assigned[name.removeprefix('./').rstrip('/')] = split
    return assigned


def comparable(name: str) -> str:
    """A name whose accents are written in one way; file systems differ."""
    return unicodedata.normalize('NFC', name)


def stem_of(path: str) -> str:
    return comparable(PurePosixPath(path).stem)


def words(name: str) -> set[str]:
    """The words of a name in small letters: instances_train2017, JPEGImages, valSet."""
    return {word.lower() for word in WORD.findall(name)}


def split_of(path: str) -> Optional[str]:
    """What a file or folder is for, by the last part of its path that says so. The names of images
    do not tell this."""
    for part in reversed(path.split('/')):
        for split, names in SPLITS.items():
            if names & words(part):
                return split
    return None


def text_of(path: Path) -> str:
    try:
        return path.read_text(encoding='utf-8-sig')
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f'{path} must be text in UTF-8: {one_line(error, 100)}') from error


def lines_of(path: Path) -> list[str]:
    """The lines of a text file that are not empty, without space around them."""
    lines = [line.strip() for line in text_of(path).splitlines()]
    return [line for line in lines if line]


def named_classes(files: Files) -> list[str]:
    """The names in a classes.txt or a similar file; empty without one.

    Raises:
        UserError: two such files contradict each other.
    """
    paths = [name for name in files.names if PurePosixPath(name).name in NAME_FILES]
    if not paths:
        return []
    first = paths[0]
    used = names_in(files.root / first)
    for path in paths[1:]:
        names = lines_of(files.root / path)
        is_reordered = names != used and sorted(names) == sorted(used)
        is_of_equal_rank = path.count('/') == first.count('/') and (
            PurePosixPath(path).name == PurePosixPath(first).name
        )
        common = min(len(names), len(used))
        if is_reordered or is_of_equal_rank and names[:common] != used[:common]:
            raise UserError(
                f'{first} and {path} in {files.root} number the classes differently; they must '
                'list the same names in the same order'
            )
        if is_of_equal_rank and len(names) > len(used):
            used = names_in(files.root / path)
    return used


def names_in(path: Path) -> list[str]:
    """The names of the classes in a file with one in each line, whose number is the label."""
    lines = [line.strip() for line in text_of(path).rstrip().splitlines()]
    if '' in lines:
        raise UserError(
            f'{path}: line {lines.index("") + 1} is empty; each line must name a class, because '
            'its number is the label'
        )
    return distinct(lines)


def distinct(names: list[str]) -> list[str]:
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise UserError(f'two classes have the same name {repeated[0]!r}')
    return names


class ImageSets:
    """The splits in the lists ImageSets/`kind`/train.txt, val.txt and so on of Pascal VOC."""

    def __init__(self, files: Files, kind: str) -> None:
        self.files = files
        self.splits: dict[tuple[str, str], str] = {}  # by the folder of ImageSets and the name
        texts = [PurePosixPath(name) for name in files.with_suffix('.txt')]
        for split in ('trainval', *SPLITS):  # later ones are more precise
            for path in texts:
                if path.parts[-3:] != ('ImageSets', kind, f'{split}.txt'):
                    continue
                for line in lines_of(files.root / path):
                    name = PurePosixPath(comparable(line))
                    is_file = name.suffix.lower() in IMAGE_ENDINGS
                    key = str(path.parents[2]), name.stem if is_file else name.name
                    self.splits[key] = split.replace('trainval', 'train')
        self.folders = dict.fromkeys(folder for folder, _ in self.splits)
        self.found: set[tuple[str, str]] = set()

    def split(self, path: str, name: str) -> Optional[str]:
        """The split of the file at `path`, which the lists call `name`: in the lists next to it, or
        if there are none, in any; or as it is assigned."""
        above = [f for f in map(str, PurePosixPath(path).parents) if f in self.folders]
        keys = [(folder, name) for folder in above or self.folders]
        self.found.update(keys)
        assigned = self.files.assigned_split(path)
        if assigned is not None:
            return assigned
        for key in keys:
            if key in self.splits:
                return self.splits[key]
        return None

    def warn(self, what: str, defects: Defects) -> None:
        """Warn about names that were not found; images of a test may be without `what`."""
        for (folder, name), split in self.splits.items():
            if (folder, name) in self.found:
                continue
            if not self.files.has_image(name):
                defects.warn('images in a list of ImageSets that do not exist', name)
            elif split != 'test':
                defects.warn(f'images in a list of ImageSets without {what}', name)
