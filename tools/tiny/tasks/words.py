"""The words that tasks, stories and filler sentences are built from.

This is data: changing a word or the order changes every sample drawn from it, including the held-out ones.
"""

from __future__ import annotations


def _words(text: str) -> list[str]:
    return text.split()


def _phrases(text: str) -> list[str]:
    return [" ".join(phrase.split()) for phrase in text.split("|")]


NAMES = _words("""
    Adam Agnes Alan Albert Alice Amber Amir Anders Andrea Anna Anton Arthur Astrid Aysha Basil Beatrix Bella Ben Bertha
    Bianca Boris Brenda Bruno Carl Carmen Cecil Chiara Clara Conrad Cora Cyril Dagmar Daisy Daniel Dara Diana Dmitri
    Dora Edgar Edith Eduardo Elena Elias Ella Elsa Emil Emma Enzo Erik Esther Eva Farid Felix Fiona Flora Frank Frida
    Gemma George Gerda Gino Gloria Greta Gustav Hanna Harold Hassan Hector Heidi Helen Henry Hilda Hugo Ida Igor Ilse
    Ines Iris Isaac Ivan Ivy Jack Jade Jana Jasper Joan Joel John Jonas Judith Julia Karin Karl Kate Keiko Kurt Lara
    Laura Lea Leo Lena Liam Lilian Linda Lorenzo Louis Lucas Lucy Luna Magda Marco Maria Marta Martin Max Maya Mila Mina
    Monica Nadia Nathan Nina Noah Nora Olga Oliver Omar Oscar Otto Paul Paula Pedro Petra Philip Pia Quinn Ralf Rania
    Rita Robert Rosa Ruth Sam Sandra Sara Silvia Simon Sofia Stella Sven Tara Theo Thomas Tina Tom Ulla Uma Vera Victor
    Viola Walter Wanda Wendy Xenia Yara Yusuf Zara Zoe
""")
CITIES = _words("""
    Rome Paris Berlin Madrid Lisbon Vienna Prague Warsaw Dublin Oslo Helsinki Stockholm Copenhagen Amsterdam Brussels
    Zurich Geneva Milan Venice Naples Athens Istanbul Cairo Tunis Nairobi Lagos Accra Dakar Tokyo Osaka Kyoto Seoul
    Beijing Hanoi Bangkok Delhi Mumbai Sydney Perth Auckland Toronto Montreal Boston Chicago Denver Seattle Austin
    Havana Lima Quito Bogota Santiago Krakow Porto Seville Lyon Hamburg Munich Cologne Leipzig
""")
COLOURS = _words("""
    red blue green yellow orange purple pink brown black white grey golden silver violet turquoise crimson
""")
THINGS = _words("""
    box lamp chair table clock vase cup plate bowl basket bottle book bag ball carpet curtain cushion door drawer
    umbrella mirror piano radio suitcase teapot towel blanket candle ladder bucket kettle jacket hat scarf bicycle boat
    kite drum guitar painting
""")
PLACES = _words("""
    kitchen garden cellar attic garage bedroom bathroom hallway library office workshop shed barn tower school station
    museum bakery market hotel harbour chapel theatre studio pantry greenhouse stable castle cabin village
""")
ANIMALS = _words("""
    fox cat dog horse rabbit bear wolf owl mouse duck goose hen frog turtle hedgehog squirrel deer goat sheep cow donkey
    otter beaver badger swan crow robin sparrow lion tiger elephant monkey penguin whale dolphin seal bee snail camel
    parrot
""")
FOODS = _words("""
    bread cheese soup rice pasta pizza salad honey butter cake pie pancakes porridge beans carrots potatoes tomatoes
    mushrooms onions spinach apples pears cherries grapes melons plums peaches lemons oranges strawberries nuts
    chocolate yoghurt noodles dumplings omelette sausages fish lentils pumpkin
""")
JOBS = _words("""
    baker teacher doctor nurse farmer painter singer dancer writer lawyer pilot sailor driver gardener carpenter plumber
    tailor butcher barber cook waiter librarian engineer architect chemist dentist judge miner printer weaver
""")
ADJECTIVES = _words("""
    old young small big little tall short quiet loud happy sad brave shy clever kind gentle curious tired hungry proud
    calm busy lazy honest lonely cheerful careful strange bright dark warm cold heavy light soft hard clean dusty empty
    full round narrow wide pretty plain fresh famous simple secret wooden broken
""")
WORDS = _words("""
    apple river stone cloud forest mountain window bridge flower silver summer winter spring autumn morning evening
    shadow thunder island ocean desert meadow valley orchard pebble feather button needle hammer pencil ribbon marble
    copper cotton velvet pepper ginger maple willow cedar lantern compass anchor barrel wagon tunnel puzzle rocket
    planet comet magnet engine wheel paper letter number circle square corner ladder basket candle mirror blanket pocket
    finger shoulder garden kitchen village castle market harbour station music story dream
""")
WHEN = _phrases("""
    today | yesterday | again | later | sometimes | at night | in the morning | in the evening | in the afternoon |
    after lunch | before breakfast | on Monday | on Tuesday | on Wednesday | on Thursday | on Friday | on Saturday |
    on Sunday | in winter | in spring | in summer | in autumn | every day | once a week | for an hour | all day long
""")
OPENERS = [when[0].upper() + when[1:] for when in WHEN]
VERBS_PAST = _words("""
    cleaned painted moved carried dropped found lost bought sold borrowed repaired opened closed admired noticed forgot
    washed polished hid showed wanted needed liked measured weighed
""")
MOTIONS = _words("""
    walked ran went drove travelled hurried returned cycled wandered strolled
""")
SPEECH = _words("""
    said thought believed heard hoped knew wrote remembered explained whispered
""")
WEATHER = _words("""
    sunny rainy cloudy windy foggy snowy stormy warm cold mild dry wet
""")
ADVERBS = _words("""
    slowly quickly quietly carefully happily sadly bravely gently loudly often never always
""")

# Only for the tokenizer's corpus, so that everyday English costs about one token per word.
COMMON = _words("""
    the of and to in is you that it he was for on are as with his they I at be this have from or one had by word but not
    what all were we when your can there use an each which she do how their if will up other about out many then them
    these so some her would make like him into time has look two more write go see number no way could people my than
    first water been call who oil its now find long down day did get come made may part over new sound take only little
    work know place year live me back give most very after thing our just name good sentence man think say great where
    help through much before line right too mean any same tell boy follow came want show also around form three small
    set put end does another well large must big even such because turn here why ask went men read need land different
    home us move try hand picture change off play spell air away house point page letter mother answer found study still
    learn should world high every near add food between own below country plant last school father keep tree never start
    city earth eye light thought head under story saw left few while along might close something seem next hard open
    example begin life always those both paper together got group often run important until children side feet car mile
    night walk white sea began grow took river four carry state once book hear stop without second later miss idea
    enough eat face watch far really almost let above girl sometimes mountain cut young talk soon list song being leave
    family body music colour server request token model prefill decode cache block router network memory system user
    assistant hello world thanks please yes remember question text object keys order alphabetical backwards reverse
    repeat count smallest largest json value null true false error message system data stream chat test code function
    return class import print
""")
