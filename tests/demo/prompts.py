"""Texts written for the goldens of the demo model: ten prompts of 20 to 1,500 tokens, plain and awkward."""

# The line breaks are part of the prompts.
# ruff: noqa: E501

from __future__ import annotations

LIGHTHOUSE = """\
A lighthouse is a tower built on a coast, an island or a reef to show a light that sailors can recognise from
far away. Its purpose is twofold: it marks a place that is dangerous, and it tells a ship where it is. Early
lights were open fires of wood or coal on a hill or on the roof of a chapel. They smoked, they were put out by
rain, and they burned more fuel in a winter than a village did. Oil lamps with several wicks came later, then
mirrors behind the lamp, and at last the lens of glass rings, which bends the light of a small flame into one
flat beam. With such a lens a lamp that would light a room could be seen thirty kilometres out at sea.
"""

KEEPERS = """\
The keeper and his family lived at the foot of the tower or, on the rocks, inside it. The work was simple and
never ended: trim the wick at dusk, wind the clockwork that turns the lens every four hours, clean the glass of
soot and salt before noon, write the weather into the log. In fog the light was of no use, so a bell or a horn
was sounded instead, sometimes for days on end. Relief came by boat, and the boat came when the sea allowed it.
There are logs in which the same sentence stands for six weeks: "Boat seen at ten, could not land." When the
lights became electric and were watched from a distant office, the keepers left one after the other, and the
towers were locked.
"""

RHYTHM = """\
So that nobody mistakes one light for another, each has its own character. One shows a white flash every ten
seconds, the next two red flashes every fifteen, a third is lit for four seconds and dark for two. The characters
are printed on the chart beside the tower, together with its height above the water and the distance at which it
can be seen in clear air. A sailor who comes from the open sea counts the seconds between two flashes, looks at
the chart and knows where he is. If he can see two lights at the same time, he takes a bearing of both, draws two
lines, and his ship lies where they cross. The method is old, needs no battery, and works as long as the lamps burn.
"""

BAKERY = """\
The bakery on Mill Street opens at five in the morning, but the work begins at midnight. First comes the dough for
the dark bread, because it has to rest the longest; it is mixed from rye, water, salt and a piece of the sourdough
that was set aside the day before. While it rests, the baker prepares the rolls. He weighs every piece, though after
thirty years he could do it by hand, and he is proud that he still checks. At two o'clock his daughter arrives. She
is an engineer and has a job in the city, but on Saturdays she comes to help with the plaits, which nobody else in
the shop can do so fast. They speak little. The oven hums, the radio plays very quietly, and outside the first tram
passes at twenty to five. Then somebody always knocks on the window, although the door is not yet open.
"""

RIVER = """\
Rivers do not keep to their beds. Where the ground is flat, a small bend grows by itself: the water on the outside of
the curve runs faster and takes earth away, while on the inside it is slow and lets sand fall. Over the years the
loops become wider and move down the valley, until two of them touch. In the next flood the river takes the short way,
and the old loop is left behind as a lake in the shape of a horseshoe. From the air one can see dozens of such lakes
beside a large river, some still blue, others already green with reeds, the oldest only a darker stripe in a field of
wheat. Each of them was once the main stream, with ferries and with mills, and people who thought that it would stay.
"""

COUNTING = """\
People counted long before they could write. A shepherd who lets his animals out in the morning puts a pebble into a
bag for each of them, and takes one out for each that returns in the evening; if pebbles are left over, animals are
missing. He needs no words for numbers. The next step is to make a mark on a stick, and after that to make a different
mark for five and for ten, since nobody can see at a glance whether there are thirteen strokes or fourteen. A sign for
nothing came very late. It is needed only when the place of a sign decides its value, as in the way of writing that we
use today: without a zero, one could not tell two hundred and five from twenty-five. With it, a child can add numbers
that would have taken a clerk a whole morning and a table covered with lines.
"""

ORCHESTRA = """\
Before a concert the oboe gives the note, and all the others tune to it. Why the oboe? Its tone is steady and clear and
can be heard through the noise of eighty people who try their instruments; and, more than that, it is hard to retune, so
it is easier if the others follow. The strings take the note first, then the woodwinds, then the brass. For a moment
there is only one sound, in every height and colour, and then it falls apart again into scales and pieces of the evening's
music. The conductor waits behind the door. When he comes in, everybody becomes quiet at once, which has little to do
with respect: all of them want to hear the very first bar begin out of silence, since it decides how the rest will go.
"""

GLASS = """\
Glass is made of sand, soda and lime. Sand alone would do, but it melts only at a heat that few ovens reach; the soda
brings the melting point down, and the lime keeps the finished glass from dissolving in water. The mixture is heated for
many hours until the bubbles have left it. A blower then takes a lump of it on the end of an iron pipe, rolls it on a
stone, and breathes into the pipe; by turning, swinging and warming again he gives it the shape that he wants, and he
has to decide quickly, because after half a minute it is too stiff. Window glass was once made in the same way, as a
large bottle that was cut open and laid flat. Today it flows out of the furnace on to a bath of molten tin, where it
spreads by itself into a sheet without any flaw, four metres wide and as long as the factory runs. It must then be
cooled slowly, over hours: glass that becomes cold too fast keeps a tension inside and one day breaks without a cause.
"""

CODE = '''\
def running_mean(values, width):
    """Return the mean of every `width` neighbours in `values`."""
    if width < 1:
        raise ValueError("width must be at least 1")
    total = sum(values[:width])
    means = [total / width]
    for i in range(width, len(values)):
        total += values[i] - values[i - width]
        means.append(total / width)
    return means


def running_max(values, width):
    """Return the largest of every `width` neighbours in `values`."""
'''

LANGUAGES = """\
English: The train to the sea leaves at noon. German: Der Zug ans Meer fährt um zwölf Uhr ab. French: Le train pour la
mer part à midi. Spanish: El tren al mar sale al mediodía. Polish: Pociąg nad morze odjeżdża w południe. Greek: Το τρένο
για τη θάλασσα φεύγει το μεσημέρι. Russian: Поезд к морю отправляется в полдень. Japanese: 海へ行く列車は正午に出ます。
Chinese: 开往海边的火车中午出发。Korean: 바다로 가는 기차는 정오에 출발합니다. Arabic: القطار إلى البحر يغادر عند الظهر. 🚂🌊
English: The ship comes back in the evening. German:"""

CHAT = """\
<start_of_turn>user
I have two apples, four pears and a lemon. What can I bake with them for six people?<end_of_turn>
<start_of_turn>model
"""

_HEATHER = "\n".join((LIGHTHOUSE, KEEPERS, RHYTHM))
_EVERYTHING = "\n".join((GLASS, RIVER, BAKERY, COUNTING, ORCHESTRA, LIGHTHOUSE, KEEPERS, RHYTHM))

PROMPTS: dict[str, str] = {
    "short": "The old clock on the town hall has stopped again, and the people in the square look up and",
    "chat": CHAT,
    "list": "Things to take on a long walk in the mountains:\n1. Water\n2. A map\n3. A warm coat\n4.",
    "code": CODE,
    "languages": LANGUAGES,
    "paragraph": LIGHTHOUSE,
    "pages": "\n".join((BAKERY, RIVER)),
    "past_one_window": _HEATHER + "\n" + RIVER,
    "past_two_windows": "\n".join((COUNTING, ORCHESTRA, GLASS, _HEATHER)),
    "long": _EVERYTHING + "\n" + CODE.split("    for")[0],
}
