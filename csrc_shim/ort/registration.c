#include "ort/registration.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/number.h"

/* A registration name with this ending offers the emulated devices and no others: ORT's convention for virtual
 * devices. */
#define VIRTUAL_SUFFIX ".virtual"

/* The requested values plus one; 0: nothing was requested. Bytes, since this library must have little thread-local
 * data (emulator/blocks/fiber.h). */
static _Thread_local uint8_t requested_emulated, requested_identity;

void ocp_request_registration(int emulated, int identity) {
  requested_emulated = (uint8_t)(emulated + 1);
  requested_identity = (uint8_t)(identity + 1);
}

/* Reads an environment variable without surrounding white space. A longer value is cut off at 63 characters, which is
 * more than any valid value has. */
static const char *variable(const char *name, char value[64]) {
  const char *text = getenv(name), *const space = " \t\r\n\v\f";
  if (!text)
    text = "";
  text += strspn(text, space);
  size_t length = strlen(text);
  while (length > 0 && strchr(space, text[length - 1]))
    length--;
  snprintf(value, 64, "%.*s", (int)(length < 63 ? length : 63), text);
  return value;
}

int ocp_emulation_requested(ocp_error *error) {
  char buffer[64];
  const char *value = variable("ORT_CUDA_PLUGIN_EMULATE", buffer);
  const int requested = *value ? ocp_parse_flag(value) : 0;
  if (requested < 0)
    ocp_fail(error, ORT_INVALID_ARGUMENT, "ORT_CUDA_PLUGIN_EMULATE='%s': use 1 or 0", value);
  return requested;
}

static int identity_named(const char *name, size_t length) {
  for (int i = 0; i < OCP_NUM_IDENTITIES; i++)
    if (strlen(ocp_ep_names[i]) == length && strncmp(ocp_ep_names[i], name, length) == 0)
      return i;
  return -1;
}

int ocp_default_identity(ocp_error *error) {
  char buffer[64];
  const char *value = variable("ORT_CUDA_PLUGIN_AS", buffer);
  const int identity = *value ? identity_named(value, strlen(value)) : OCP_IDENTITY_OWN;
  if (identity < 0)
    ocp_fail(error, ORT_INVALID_ARGUMENT, "ORT_CUDA_PLUGIN_AS='%s': use %s or %s", value,
             ocp_ep_names[OCP_IDENTITY_OWN], ocp_ep_names[OCP_IDENTITY_CUDA]);
  return identity;
}

int ocp_registration_requested(const char *registered_name, ocp_registration_request *request, ocp_error *error) {
  const size_t suffix = strlen(VIRTUAL_SUFFIX);
  size_t length = strlen(registered_name);
  const bool is_virtual = length >= suffix && strcmp(registered_name + length - suffix, VIRTUAL_SUFFIX) == 0;
  if (is_virtual)
    length -= suffix;
  int identity = requested_identity - 1;
  if (identity < 0)
    identity = identity_named(registered_name, length);
  if (identity < 0)
    identity = ocp_default_identity(error);
  int emulated = is_virtual ? 1 : requested_emulated - 1;
  if (identity >= 0 && emulated < 0)
    emulated = ocp_emulation_requested(error);
  if (identity < 0 || emulated < 0)
    return error->code;
  *request = (ocp_registration_request){(ocp_identity)identity, .cuda = !is_virtual, .emulated = emulated != 0};
  return ORT_OK;
}
