"""The words of the playground. The tokenizer of the tiny base is made of them: a change means a new base.

Purpose: entities are capitalised pseudo-words, like names that a real model has met as words but not in these
tasks; each split has its own. All other words are ordinary and shared. Some belong to sites that do not exist
yet.
"""

import random

from rmsweb.records import Split

_COMMON = """
a about access account action add address after again agency air airline airport alarm alert alerts all also
an and answer any applicant apply archive area armchair arrival article articles as ask at author autumn
back bag baker banner basket bed before bench best between big bill birth black blank blanket block blog
blue board boat book booked booking books boots bottle box branch bread breakfast bridge bronze brown browse
browser building bus busy button buy by calendar calm camera cancel capital captcha car card careers cars
cart cashier cat categories category chair chairs challenge change cheap check checkout choose cite citizen
city class clear clerk click clinic clock close closed coast coat code cold color column companies company
compare confirm confirmed contact contacts continue copy corner cost cotton council country course cream
credit crimson cup curtain customer cyan daily dark date day days deadline deal deals default delete deliver
delivery denied department departure desk destination details digital dinner discover district document
documents donate done door double down download draft drawer driver dropped dry duration earlier early east
economy edit editor elder elevation empty end engine enter entry error evening event events express fair
family fare fast fee feed fees fever few field file files fill filter filters find fine finish fire first
fish flat flight flights floor flower follow footer for forbidden forest form forms found founded fresh
friday from front full galaxy garden gate get gift glass go gold gray green grid ground group guest guests
guide hall hand harbor hardware head heading health heavy height help her here high hill hills history home
hotel hotels hour hours house how human ice id if image in index info input inquiry is island issue it item
items ivory jacket job jobs join journal journey key keys kind kitchen lake lamp lamps language large last
late later latest law leather left length less letter level library license light lilac lime line linen link
links list little local location log login logout long lookup lot low magenta mail main manager many map
maps market maroon marriage mason maximum me meals medium member menu message metal middle minimum mint
mobile monday month monthly more morning mountain mountains move museum music my name narrow navy near
nearby new news next night nights no none normal north not note notes nothing notice now number nurse oak
ocean of off offer offers office offices official ok old olive on once one online only open option options
or orange order ordered orders origin other our out over owner pack page pages paint painter palace paper
park parking part partner pass passenger passport past path pay payment peak people permit permits person
phone photo photos pick piece pilot pine pink place places plan plans plate please plum point popular
population portal position post pre preview previous price print private product products profile public
purple quality quantity query question quick quiet rail rain random rank rate rating read ready receipt
record records red reference refund region regions register related reload remove rent report request
reservation reserve reserved reset result results retry return review reviews right river road robot role
room rooms rose round route row rule safe salary sale sales salmon sand saturday save saved search season
seat second section see select sell send sent separate service services settings shade share shelf shift
ship shipping shoe shoes shop shops short show sign silver simple single site sites size sizes sky slim slow
small sofa soft sold some sort source sources south spring staff stage standard star stars start state
station status stay step steps stock stone store stories story street student style subject submit success
suite summary summer sunday support surname table tables tag talk tall tax taxes teacher team tell terminal
text than thank that the then there these this thursday ticket tickets time title to today tomorrow tools
top topic total tower town trade traffic train travel tree trip trips try tuesday tutor type under union
unit until up update upper us user vacancies valley value vase verify view villa village violet visit volume
waiter waiting walk wall warm watch water way weather web wednesday week weekly welcome welder west what
wheel when where which white wide width wiki wild wind window winter wish wishlist with wood wool word work
worker world write year yellow yes you young your zone
""".split()  # noqa: SIM905

# capitalised at the beginning of a task
_FIRST_WORDS = "at on in go open find buy tell use log apply please visit".split()  # noqa: SIM905

# Number of the draw of the splits. Draw anew if the recipe changes after someone has looked at held-out runs.
SPLIT_DRAW = 3
NUM_ENTITIES = {"train": 240, "dev": 40, "held-out": 140}


def _names(count: int, seed: int) -> list[str]:
    """Return distinct pronounceable capitalised words, none of them in the common list."""
    r, names = random.Random(seed), dict[str, None]()
    while len(names) < count:
        syllables = "".join(r.choice("bdfgklmnprstvz") + r.choice("aeiou") for _ in range(2))
        name = syllables + r.choice(("", "n", "r", "s", "x", "l"))
        if name not in _COMMON:
            names[name.capitalize()] = None
    return list(names)


_NAMES = _names(sum(NUM_ENTITIES.values()), 1)
random.Random(f"splits/{SPLIT_DRAW}").shuffle(_NAMES)  # the vocabulary, and with it the base, stays as it is


def entities(split: Split) -> list[str]:
    """Return the names that tasks and pages of a split are made of; no name is in two splits."""
    start = 0
    for name, count in NUM_ENTITIES.items():
        if name == split:
            return _NAMES[start : start + count]
        start += count
    raise ValueError(f"split {split!r}: expected one of {', '.join(NUM_ENTITIES)}")


def vocabulary() -> list[str]:
    """Return every word that the tokenizer knows, sorted."""
    return sorted({*_COMMON, *map(str.capitalize, _FIRST_WORDS), *_NAMES})
