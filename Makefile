# mkd: one resident kernel, one token at a time. `make help` says what there is.
SHELL   := /bin/bash
CC      ?= gcc
PREFIX  ?= /usr/local
BUILD   ?= build
NVCC    ?= $(firstword $(wildcard $(shell command -v nvcc 2>/dev/null) /usr/local/cuda/bin/nvcc))
SAN     ?=
COMMIT  := $(shell git describe --always --dirty --abbrev=12 2>/dev/null || echo unknown)

WARN    := -Wall -Wextra -Wshadow -Wconversion -Wno-sign-conversion -Wstrict-prototypes -Wmissing-prototypes -Wno-psabi
CFLAGS  ?= -O3 -g
# -ffp-contract=off: a multiply-add is two roundings on every machine, so the twin's bits do not depend on the compiler's mood.
override CFLAGS += -std=c11 -D_GNU_SOURCE -I. $(WARN) -ffp-contract=off -fno-math-errno -pthread -MMD -MP $(SAN)
LDLIBS  := -lzmq -ljansson -lnuma -lm -pthread

MAINS   := host/mkd.c ipc/mkctl.c
LIBSRC  := $(filter-out $(MAINS),$(wildcard instructions/*.c megakernel/*.c host/*.c ipc/*.c))
LIBOBJ  := $(LIBSRC:%.c=$(BUILD)/%.o)
TESTS   := $(patsubst tests/%.c,$(BUILD)/tests/%,$(wildcard tests/test_*.c))
TESTLIB := $(patsubst %.c,$(BUILD)/%.o,$(wildcard tests/support/*.c))

.PHONY: help all deps test asan demo check-gpu bench install clean
.SECONDARY:
help:
	@echo 'make deps         install what a fresh Debian 12 needs (apt; root or sudo)'
	@echo 'make all          build mkd, mkctl and the client library into $(BUILD)/'
	@echo 'make test         build and run every test (no GPU needed), plain and with sanitizers'
	@echo 'make demo         start the daemon on the small checkpoint, stream a generation, stop'
	@echo 'make check-gpu    GPU tests; run on the machine with the GPU'
	@echo 'make bench        benchmarks; JSON under profiles/results/'
	@echo 'make install PREFIX=/usr/local DESTDIR='

all: $(BUILD)/mkd $(BUILD)/mkctl $(BUILD)/libmkd-client.a
ifeq ($(NVCC),)
	@echo 'nvcc not found: built for the CPU twin only'
endif

$(BUILD)/build.o: .FORCE
.PHONY: .FORCE
$(BUILD)/%.o: %.c
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -c -o $@ $<
$(BUILD)/host/version.o: override CFLAGS += -DMK_COMMIT='"$(COMMIT)"'

$(BUILD)/libmk.a: $(LIBOBJ)
	@rm -f $@ && ar rcs $@ $^
$(BUILD)/libmkd-client.a: $(BUILD)/ipc/client.o $(BUILD)/ipc/wire.o $(BUILD)/host/err.o
	@rm -f $@ && ar rcs $@ $^
$(BUILD)/mkd: $(BUILD)/host/mkd.o $(BUILD)/libmk.a
	$(CC) $(CFLAGS) -o $@ $^ $(LDLIBS)
$(BUILD)/mkctl: $(BUILD)/ipc/mkctl.o $(BUILD)/libmk.a
	$(CC) $(CFLAGS) -o $@ $^ $(LDLIBS)
$(BUILD)/tests/test_%: $(BUILD)/tests/test_%.o $(TESTLIB) $(BUILD)/libmk.a
	$(CC) $(CFLAGS) -o $@ $^ -lcmocka $(LDLIBS)

clean:
	rm -rf $(BUILD)
-include $(shell find $(BUILD) -name '*.d' 2>/dev/null)
