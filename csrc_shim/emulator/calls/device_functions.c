#include "emulator/calls/device_functions.h"

#include <inttypes.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "emulator/host/cpu.h"
#include "emulator/state.h"

/* ---- directed rounding ---- */

enum { ADD, SUB, MUL, FMA, DIV, SQRT };

double ocp_emu_directed(uint32_t operation, uint32_t mode, double a, double b, double c) {
  volatile double x = a, y = b, z = c, result = 0; /* volatile: no operation moves across the change of mode */
  emu_float_control control = emu_float_control_read();
  emu_float_control_write(emu_float_rounding(control, mode));
  switch (operation) {
  case ADD:
    result = x + y;
    break;
  case SUB:
    result = x - y;
    break;
  case MUL:
    result = x * y;
    break;
  case FMA:
    result = fma(x, y, z);
    break;
  case DIV:
    result = x / y;
    break;
  default:
    result = sqrt(x);
    break;
  }
  emu_float_control_write(control);
  return result;
}

uint64_t ocp_emu_clock(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* ---- printf ---- */

enum { SPEC_BYTES = 64, LINE_BYTES = 4096 };

typedef struct reader {
  const uint8_t *start;
  size_t offset;
  uint32_t count;
} reader;

static uint64_t next_value(reader *from, size_t bytes) {
  uint64_t value = 0;
  from->offset = (from->offset + bytes - 1) / bytes * bytes;
  memcpy(&value, from->start + from->offset, bytes);
  from->offset += bytes;
  from->count++;
  return value;
}

/* Prints one conversion. `spec` holds its text without length modifier and letter: "%-8.3". Returns the number of
 * characters. */
static int print_value(char *out, size_t room, char spec[SPEC_BYTES], bool is_long, char letter, reader *from) {
  size_t end = strlen(spec);
  if (strchr("diuoxX", letter) && is_long) {
    snprintf(spec + end, SPEC_BYTES - end, "ll%c", letter);
    return snprintf(out, room, spec, (long long)next_value(from, 8));
  }
  snprintf(spec + end, SPEC_BYTES - end, "%c", letter);
  if (strchr("diuoxXc", letter))
    return snprintf(out, room, spec, (int)next_value(from, 4));
  if (strchr("fFeEgGaA", letter)) {
    uint64_t bits = next_value(from, 8);
    double value;
    memcpy(&value, &bits, sizeof value);
    return snprintf(out, room, spec, value);
  }
  uint64_t address = next_value(from, 8);
  if (letter == 's') /* a device address of the string: its host alias is at a constant distance */
    return snprintf(out, room, spec, address ? (const char *)(address + (uint64_t)emu.alias) : "(null)");
  return snprintf(out, room, spec, (void *)address);
}

/* Prints the conversion whose text after the '%' begins at *format, and advances *format behind it. Returns the number
 * of characters. */
static int print_conversion(char *out, size_t room, const char **format, reader *from) {
  char spec[SPEC_BYTES] = "%";
  size_t used = 1;
  const char *at = *format;
  for (; *at && strchr("-+ #0123456789.*", *at) && used < SPEC_BYTES - 16; at++) {
    if (*at == '*')
      used += (size_t)snprintf(spec + used, SPEC_BYTES - used, "%d", (int)next_value(from, 4));
    else
      spec[used++] = *at;
  }
  spec[used] = 0;
  bool is_long = false;
  for (; *at && strchr("hlzjtL", *at); at++)
    is_long |= *at != 'h';
  *format = at + (*at != 0);
  if (*at == '%')
    return snprintf(out, room, "%%");
  if (!*at || !strchr("diuoxXcfFeEgGaAsp", *at))
    return snprintf(out, room, "%s", spec);
  return print_value(out, room, spec, is_long, *at, from);
}

uint32_t ocp_emu_printf(ocp_emu_thread *thread, const char *format, const uint8_t *arguments) {
  (void)thread;
  char line[LINE_BYTES];
  size_t used = 0;
  reader from = {.start = arguments};
  while (*format && used < sizeof line - 1) {
    if (*format != '%') {
      line[used++] = *format++;
      continue;
    }
    format++;
    int printed = print_conversion(line + used, sizeof line - used, &format, &from);
    used += printed < 0 ? 0 : (size_t)printed;
  }
  fwrite(line, 1, used < sizeof line ? used : sizeof line - 1,
         stdout); /* one call, so that lines of several threads do not mix */
  fflush(stdout);
  return from.count;
}
